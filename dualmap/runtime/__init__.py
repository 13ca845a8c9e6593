"""What every process needs: settings, logs, telemetry, metrics, periodic loops, leadership."""
