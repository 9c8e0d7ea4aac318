"""Engines that generate responses: one small interface, one file per engine.

An engine takes requests of token ids and gives responses of token ids, with the log-probs that it sampled with. It
knows neither Ray nor the roles around it. Settings name an engine by its file, or one of a user's own as `module:Name`.
"""
