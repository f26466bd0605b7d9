"""The process and what surrounds it: files, users' modules, signals, and the launcher that started it."""
