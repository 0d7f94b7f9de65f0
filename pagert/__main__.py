# SPDX-License-Identifier: Apache-2.0
"""`python -m pagert` is the command `pagert`."""

from pagert.cli import main

raise SystemExit(main())
