"""Reports runs and replays, as an HTML page or an SVG figure.

page_report    the data of a report on a run or a replay
run_report     reads the reports on runs from their files
page           writes the data as an HTML page
figure         draws the data as an SVG figure
incident_text  describes an incident for the page of a run
"""
