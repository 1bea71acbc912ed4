"""Adapters in the simulation: engines that hold them, users who load and unload them, and what must be true.

They have worlds of their own, `World(seed, adapters=True)`; all faults and situations of the others happen
there as well.
"""
