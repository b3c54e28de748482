"""Many runs of a spec, resumable, on processes or an existing Dask cluster."""
