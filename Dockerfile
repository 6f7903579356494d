# One image for the API, the worker and the migrations (docs/deployment.md).
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY api ./api
COPY tuner ./tuner
COPY operators ./operators
COPY cost_model ./cost_model
COPY db ./db
# The API and the planner import no torch; a worker on CPUs wants torch's CPU build: name its index in PIP_ARGS.
ARG TORCH=torch==2.13.0
ARG PIP_ARGS=
RUN pip install --no-cache-dir $PIP_ARGS --constraint constraints.txt "$TORCH" \
 && pip install --no-cache-dir --constraint constraints.txt '.[ray,service]' \
 && useradd --create-home flatpeak
USER flatpeak
EXPOSE 8642
ENTRYPOINT ["flatpeak"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8642"]
