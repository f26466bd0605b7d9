"""How long tasks take, and when each would start and end: costs, measured or given, and the
simulator. Plans nothing."""
