"""Measure speed: the engines, a plain eager loop and lower limits, as ratios from one run."""

from fedcover.analysis.bench import baseline as baseline
from fedcover.analysis.bench.runner import MAX_SPREAD_RATIO as MAX_SPREAD_RATIO
from fedcover.analysis.bench.runner import Measurement as Measurement
from fedcover.analysis.bench.runner import bench as bench
from fedcover.analysis.bench.runner import page as page
