"""Figures printed in papers whose plan is known, the groups they are reported in, and the accepted errors."""
