"""What several benchmarks need: engines side by side, recorded policies, files, tables, plots."""
