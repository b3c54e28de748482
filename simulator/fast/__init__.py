"""The closed forms over arrays, compiled: many plans of one problem at once."""
