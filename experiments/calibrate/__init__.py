"""From files of a source, or from measured runs, to a calibration."""
