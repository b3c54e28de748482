"""Pipeline schedules: the static order of forwards and backwards on each rank."""
