# SPDX-License-Identifier: BSD-3-Clause
"""Fused attention inside other libraries. Each module imports its library only when it is used."""
