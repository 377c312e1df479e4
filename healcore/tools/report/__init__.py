"""Reports runs and replays, as an HTML page or an SVG figure.

run_report     the data of a report, and how the data is read from the files of a run
page           writes the data as an HTML page
figure         draws the data as an SVG figure
incident_text  describes an incident for the page of a run
"""
