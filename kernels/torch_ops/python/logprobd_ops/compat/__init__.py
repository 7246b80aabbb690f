"""linear_logprob under the names and signatures of other projects, one module a project.

How to switch a framework over: SWITCHING.md.
"""
