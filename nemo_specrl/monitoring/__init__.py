"""The metrics of a run, and the pictures and pages made from them.

Modules, each of which imports only from those below it::

    report             pictures, tables and pages of a run or of two runs side by side
    comparison         the figures of a plain and a speculative run, side by side
    run_steps          the steps of a run, from its metrics.jsonl
    run_plot           the picture of one run
    comparison_plot    the picture of a plain and a speculative run
    drawing            the canvas, colours and panels of all pictures
    metrics_file       metrics.jsonl, written and read; TensorBoard
    prometheus         the same metrics for Prometheus: a textfile, Ray's endpoint
    names              the names of all metrics, with their meaning and unit
    heartbeat          heartbeats for ft_launcher of nvidia-resiliency-ext
"""
