"""Plans: the plan, the program of each rank, its memory, and one iteration of all ranks for the simulator."""
