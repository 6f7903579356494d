# One image for the API, the worker and the migrations. CPU build; see docs/deployment.md for CUDA.
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY api ./api
COPY tuner ./tuner
COPY operators ./operators
COPY cost_model ./cost_model
COPY db ./db
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" --constraint constraints.txt "$TORCH" \
 && pip install --no-cache-dir --constraint constraints.txt '.[service]' \
 && useradd --create-home flatpeak
USER flatpeak
EXPOSE 8642
ENTRYPOINT ["flatpeak"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8642"]
