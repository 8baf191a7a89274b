"""Scaling laws: plan.py lays out runs at equal compute, records.py takes what they came to and refuses what must not be
fitted, fit.py and optimum.py are the arithmetic, report.py and plots.py what a reader is shown.

Letters: N trainable parameters (a tied table once), D training tokens, C = D times the cost model's FLOPs a token.
"""
