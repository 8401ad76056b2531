"""A stand-in for NeMo-Skills, whose package is in no registry.

It has the functions that nemo_run_ray touches, with NeMo-Skills' names, signatures and ways, and
refuses what NeMo-Skills refuses. CONTRIBUTING.md says how the patch is run with the real source.
"""
