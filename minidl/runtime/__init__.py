"""Runs programs: devices, lanes, memory, executors, and the transports between ranks. Schedules decide the order."""
