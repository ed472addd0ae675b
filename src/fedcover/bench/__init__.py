"""How fast, measured: our engines beside the plain eager loop and beside floors, as ratios of one run."""

from fedcover.bench import eager as eager
from fedcover.bench import ours as ours
from fedcover.bench.measuring import STEADY as STEADY
from fedcover.bench.measuring import Line as Line
from fedcover.bench.measuring import bench as bench
from fedcover.bench.measuring import page as page
