import createClient from "openapi-fetch";
import type { paths } from "./schema.js";

export type { components, paths } from "./schema.js";

/** A refused or failed request: the service's problem document (RFC 9457). */
export class UndertowError extends Error {
  constructor(
    readonly status: number,
    readonly type: string,
    detail: string,
  ) {
    super(detail);
    this.name = "UndertowError";
  }
}

/**
 * A client of the service at `url`, with one method for each HTTP method: paths, parameters, bodies and answers
 * are typed by the service's OpenAPI document. What the service refuses throws an UndertowError.
 */
export function undertow(url: string, key?: string) {
  const headers = key === undefined ? {} : { Authorization: `Bearer ${key}` };
  const client = createClient<paths>({ baseUrl: url.replace(/\/+$/, ""), headers });
  client.use({
    async onResponse({ response }) {
      if (response.ok) return;
      const problem = await response.clone().json().catch(() => ({}));
      throw new UndertowError(
        response.status,
        problem.type ?? "about:blank",
        problem.detail ?? `the service answered ${response.status}`,
      );
    },
  });
  return client;
}
