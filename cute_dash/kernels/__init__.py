"""Hopper (sm_90a) device code in the CuTe DSL; every module here needs cutlass."""
