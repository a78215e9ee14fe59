"""Deterministic simulation: the real store over modelled time, lanes and media.

One seed decides all: `python -m tierkv.simulation --seeds 20`, or `--seed 7` to replay one. What
runs is the service's own Catalog, Planner, Policy, Matches, Stages, Puts and WriteBehind; the RAM
arena is real but small.
"""
