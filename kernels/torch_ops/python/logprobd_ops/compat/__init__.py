"""Provides linear_logprob with the names and signatures of other projects, one module per project.

SWITCHING.md describes how to switch a framework to these functions.
"""
