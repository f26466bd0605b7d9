"""Runs programs on devices: the runtime, its executors, and transports between ranks. Schedules decide the order."""
