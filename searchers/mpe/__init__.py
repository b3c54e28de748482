"""MPE: stage costs composed from unique layers instead of compiled and profiled."""
