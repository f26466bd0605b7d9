"""Timelines, reports, traces and pictures. Nothing here changes what runs."""
