"""Pages of HTML about finished work. Only ``cli`` imports this package, and only it imports matplotlib and jinja2."""
