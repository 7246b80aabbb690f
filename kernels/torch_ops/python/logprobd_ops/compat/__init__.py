"""linear_logprob under the names and signatures of other projects, one module per project.

SWITCHING.md describes how to switch a framework over.
"""
