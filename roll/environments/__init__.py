"""Environments: what a response is answered with, and what it is worth. One file each.

An environment is one episode: it is made, run and thrown away. Settings name it by its file, or as `module:Name`.
"""
