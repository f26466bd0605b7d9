"""Pages and reports of plans and runs, for people. Nothing here changes what runs."""
