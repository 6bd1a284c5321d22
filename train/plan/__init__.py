"""What can be said of a run before any device is taken: schedules, memory, communication, time."""
