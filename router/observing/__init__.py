"""What looks on as requests pass: timelines, spans, logs."""
