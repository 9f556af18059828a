"""What a finished run tells: its measured timeline beside what theory expects. No torch."""
