"""Looking at plans, fleets and runs: audits, reports, benchmarks."""
