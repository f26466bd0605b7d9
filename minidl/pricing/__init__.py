"""How long a schedule takes: costs of tasks, and the simulator. Nothing here measures or runs."""
