"""The commands of ``windtunnel``, a file each, which import what they need as they run."""
