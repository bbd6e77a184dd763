"""Would the proof notice? Graphs damaged in every way that we know."""
