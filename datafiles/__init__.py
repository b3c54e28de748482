"""Reading, checking and writing data files: the ground floor, which imports nothing of ours.

Every preset, runtime, profile and plan enters through `datafiles.loader` and leaves through
`datafiles.writer`. Any byte string ends in a plain Python value or a `DataFileError`.
"""
