"""Predictions beside what others measured: groups of cases, the gate on their errors, the page that shows them."""
