#!/bin/sh
# Runs a compiler without warnings; ccache calls it as its prefix (CCACHE_PREFIX).
exec "$@" -w
