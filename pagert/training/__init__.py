# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a training job become paged, and when."""
