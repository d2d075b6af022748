"""Checks a launch of verl as verl imports it: `VERL_USE_EXTERNAL_MODULES=ckptkit.hooks_verl`."""

import sys

from ckptkit.app.hooks import check_launch

check_launch(sys.argv[1:])
