"""Plugin of verl: `import verl` loads it through the entry point group `verl.plugins`.

It replaces verl's linear_cross_entropy if the environment variable LINEAR_LOGPROB_VERL is 1. It is outside the package
logprobd_ops, because importing that loads the operator's library: an error must be reported, and verl must not
pay for a plugin that is switched off.
"""

import logging
import os

VARIABLE = "LINEAR_LOGPROB_VERL"

if os.environ.get(VARIABLE, "0") not in ("", "0"):
    try:
        if os.environ[VARIABLE] != "1":
            raise ValueError(f"{VARIABLE} is {os.environ[VARIABLE]!r}: it must be 0 or 1")
        from logprobd_ops.compat.verl import apply_logprobd_kernel

        apply_logprobd_kernel()
    except Exception:
        # verl itself reports a plugin's exception only at level DEBUG.
        logging.getLogger(__name__).exception(
            "verl keeps its own linear_cross_entropy: logprobd_ops could not replace it, although %s is set",
            VARIABLE,
        )
        raise
