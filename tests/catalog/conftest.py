import hypothesis

hypothesis.settings.register_profile("no deadline", deadline=None)  # wall times vary with the load
hypothesis.settings.load_profile("no deadline")
