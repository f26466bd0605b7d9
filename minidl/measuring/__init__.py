"""Costs measured on a device: tasks alone, on lanes, and two at a time."""
