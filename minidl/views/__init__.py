"""What people look at: timelines, reports, traces, pictures. Nothing here changes what runs."""
