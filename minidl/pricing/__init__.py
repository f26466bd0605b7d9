"""How long tasks take, and when each would start and end: cost models, measured or given, and the simulator."""
