"""The data of a step: tasks, their graph, a schedule of it, the timeline of a run; and their text and pictures."""
