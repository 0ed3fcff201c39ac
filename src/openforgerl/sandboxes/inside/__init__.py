"""What runs inside a sandbox as PID 1; it shares no import with the rest of the package."""
