"""``python -m mxfp4_ops bench``: the ops' times beside the same job in plain torch and beside a copy of the same bytes.

``cli`` options and the run; ``jobs`` what is timed and what it must give; ``plain`` the ops in plain torch, peers and
reference; ``routing`` router ids; ``timing`` clocks; ``floors`` what no kernel beats; ``report`` table, JSON and plot.
"""
