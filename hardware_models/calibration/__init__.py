"""Scripts that fit the constants of the preset files to measured tables; each prints what it found."""
